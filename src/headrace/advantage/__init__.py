"""From rewards to advantages: one small function per estimator."""

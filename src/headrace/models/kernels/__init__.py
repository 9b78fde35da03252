"""Native kernels, one folder per device."""

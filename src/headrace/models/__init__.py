"""Models: the catalogue, the forwards, packed rows and the native kernels."""

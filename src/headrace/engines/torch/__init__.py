"""The built-in engine: continuous batching with torch or the native kernels."""

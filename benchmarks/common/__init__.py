"""Code that benchmarks share: batches, clocks, flags, and a description of the machine."""

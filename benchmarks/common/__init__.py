"""Parts that benchmarks share: batches, clocks, flags, and what they ran on."""

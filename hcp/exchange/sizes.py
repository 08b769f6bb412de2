"""Sizes by which exchanges are cut and weighed. Choices of comm and scan types know them, too."""

STAGE_TOKENS = 8192
"""Tokens whose keys are worth an exchange of their own under "all_gather", so that they come while
others are computed."""

ROUND_BYTES = 1 << 24
"""The price of one more round of messages, in bytes that a link carries meanwhile: 67 us at 250
GB/s. An exchange of `peer` has a fixed part of 85 us on two H200s."""

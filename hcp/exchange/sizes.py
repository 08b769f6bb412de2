"""Sizes by which exchanges are cut and weighed. Choices of comm and scan types know them, too."""

STAGE_TOKENS = 8192
"""Tokens whose keys are worth an exchange of their own under "all_gather", so that they come while
others are computed."""

ROUND_BYTES = 1 << 20
"""The price of one more round of messages, in bytes that a link carries while one starts."""

"""Sizes by which exchanges are cut and weighed. Choices of comm and scan types know them, too."""

STAGE_TOKENS = 8192
"""Tokens whose keys are worth an exchange of their own under "all_gather", so that they come while
others are computed."""

ROUND_BYTES = 1 << 20
"""The price of one more round of messages, in bytes that a link carries while one starts."""

LOCAL_BYTES = 16
"""Bytes that a GPU reads or writes in its own memory while a link carries one: 4 TB/s over 250
GB/s."""

ROW_COPIES = 4
"""How often rows are read and written, beside their way over the link, where they travel for heads
and back: measured of gated delta nets of 32,768 and 131,072 tokens on 2 H200s."""

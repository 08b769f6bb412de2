"""The one exception that is hcp's own."""


class HcpError(RuntimeError):
    """Something other than an argument is wrong: ranks disagree, a peer is gone, a slot failed.

    The message says what was found, what was expected, where, and what to do. On many ranks it
    starts with the rank. Wrong arguments raise ValueError.
    """

"""Code that the demo, the commands and the trainers' programs share.

The doors are ``launch.Program``, which starts ranks and prints an error in one line,
``ranks.initialize_distributed`` and ``data.read_corpus``.
"""

"""Share what the demo, the commands and the trainers' programs have in common.

The doors are ``launch.Program``, which starts ranks and ends them in one line when something is
wrong, ``ranks.initialize_distributed`` and ``data.read_corpus``.
"""

"""Swap the process groups that a model holds, and put them back.

The doors are ``rebind.eval_cp_context`` and ``rebind.rebind``. ``walk`` finds the places in a model
that hold a group, ``rules`` and ``derived`` say what follows from one.
"""

"""Swap the process groups that a model holds, and put them back.

The doors are ``rebind.eval_cp_context`` and ``rebind.rebind``. ``walk`` goes through a model:
``places`` are where an object holds values, ``twins`` say which eval group stands for which train
group, ``derived`` and ``rules`` what follows from a group. A place that changes is a slot
(``writers``). ``tables`` keeps the slots with the model. ``holders`` searches outside the model.
"""

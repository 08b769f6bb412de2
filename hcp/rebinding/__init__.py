"""Swap the process groups that a model holds, and restore them.

The doors are ``rebind.eval_cp_context`` and ``rebind.rebind``. ``walk`` goes through a model.
``places`` lists where an object holds values. ``twins`` maps each train group to its eval group.
``derived`` and ``rules`` cover values that depend on a group. A place that changes is a slot
(``writers``). ``tables`` keeps the slots with the model. ``holders`` searches outside the model.
"""

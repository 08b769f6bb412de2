"""Decide which ranks compute which sequences.

The door is ``plan.plan``: it makes a ``Plan`` of lengths and limits. ``check.check_plan`` proves a
plan, ``cost.CostModel`` prices it, ``report`` judges it.
"""

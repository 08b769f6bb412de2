"""Decide which ranks compute which sequences.

The door is ``plan.plan``: lengths and limits in, a ``Plan`` out. ``check.check_plan`` proves a
plan, ``cost.CostModel`` prices it, ``report`` and ``timeline`` show it.
"""

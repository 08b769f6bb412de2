"""Evaluate under another layout than training's.

The doors are ``plan.EvalPlan``, ``metrics.Metrics`` and ``choose.choose_eval_context_parallel``.
"""

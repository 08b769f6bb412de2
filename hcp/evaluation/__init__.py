"""Evaluation under another layout than that of training.

The doors are ``plan.EvalPlan``, ``metrics.Metrics`` and ``choose.choose_eval_context_parallel``.
"""

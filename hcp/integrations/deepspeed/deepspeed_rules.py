"""The rule for rebinding models of a DeepSpeed engine. DeepSpeed is not imported."""

from __future__ import annotations

from hcp.rebinding.packages import PackageRules

RULES = PackageRules(sharders=("deepspeed.runtime", "deepspeed.comm", "deepspeed.utils"))
"""ZeRO and its partitioned parameters keep groups over which they shard and average. The eval
layout has the same ranks, so they stay."""

"""Megatron-LM's own training scripts: hcp at the places where Megatron-LM plans, builds and loads.

`python -m hcp.integrations.megatron.launch pretrain_gpt.py ...` runs a script so, and
`import hcp.integrations.megatron.patch` in a script does the same. Guide:
docs/guides/megatron_lm.md.
"""

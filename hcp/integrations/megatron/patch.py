"""Put hcp in place in Megatron-LM: `import hcp.integrations.megatron.patch` in a script of one's
own, before it parses its arguments. `hcp.integrations.megatron.launch` needs no such line."""

from hcp.integrations.megatron.lm.seams import install

install()

"""Run a training step.

The door is ``dispatch.dispatch``: it moves samples to the ranks that compute them and makes a
``handler.ContextParallelHandler`` for each micro-batch.
``config.Config`` holds a trainer's options.
"""

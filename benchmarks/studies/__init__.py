"""Programs that study the planner, the kernels and the machine, and compare hcp with nothing."""

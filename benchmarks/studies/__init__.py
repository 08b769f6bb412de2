"""Programs that study the planner and the kernels without timing them."""

"""When slabs move: the schedule of a step, the plan of what is held, and the parts of an update."""

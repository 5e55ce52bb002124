"""Who decides where jobs go in virtual time: one planner, whole compiled fleets, the live controller."""

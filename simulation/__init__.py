"""Virtual clock, modelled engines and workloads around the live planning, routing and controller code."""

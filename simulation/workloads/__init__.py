"""Jobs to serve: lengths, arrivals, traces, the scenarios of the papers and settings of a user."""

"""Systems to compare, their capacity and its bound, and the size of a fleet."""

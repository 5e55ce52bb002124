"""Several controllers for one fleet: each decides for its part of the replicas, and the first one leads."""

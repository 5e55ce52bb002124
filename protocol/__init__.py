"""What ingress, controller and replicas say to one another, and when a promise counts as kept."""

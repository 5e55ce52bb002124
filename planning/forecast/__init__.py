"""What happens to every request of a replica if nothing else arrives."""

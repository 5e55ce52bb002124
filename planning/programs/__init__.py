"""What is expected of an agent program, and the deadlines of its stages."""

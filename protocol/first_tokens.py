"""When an ingress tells of a first token ahead of its request's end; simulations keep to the same."""

PERIOD_S = 0.5  # between two looks at what runs
SOON_S = 1.0  # after its first token, or after that was due, that a request may end and say it all at once

"""What a rank records of its steps: events, where their time went, what it held, the scalars that they return."""

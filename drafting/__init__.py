"""What proposes tokens: one file a drafter."""

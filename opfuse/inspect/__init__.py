"""What a call does, what it saves, and why."""

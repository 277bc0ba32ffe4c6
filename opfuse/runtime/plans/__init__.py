"""Plans by key: what a key holds, why a call missed, what a process planned."""

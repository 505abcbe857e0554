"""The front door: accepts requests, holds them, and binds each one to a free slot of an agent."""

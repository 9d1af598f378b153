"""Where snapshots are kept: as folders that one rename publishes, or in memory."""

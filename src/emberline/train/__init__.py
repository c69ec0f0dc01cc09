"""Training of drafts: synthesis of data, features, losses, the loop, export."""

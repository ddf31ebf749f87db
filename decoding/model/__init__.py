"""The lean transformer and where its weights come from."""

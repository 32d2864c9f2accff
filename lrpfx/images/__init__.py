"""Images: opened, prepared for a model, and where the model's input lies on them."""

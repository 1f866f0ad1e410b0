"""Model architectures, by the names that Hugging Face configs give them."""

"""Model architectures, under the names that Hugging Face configs use."""

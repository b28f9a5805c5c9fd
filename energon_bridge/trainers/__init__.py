"""Adapters to trainers, under the names that each of them uses; monitors for Lightning."""

"""Clicks: tables of categories and numbers, a model of embeddings, AUC and calibration."""

"""Clicks: tables of categories and numbers, the model of the papers, AUC and calibration."""

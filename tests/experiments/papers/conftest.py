"""Quadrature, against which estimators are held."""

from quadrature import quadrature

__all__ = ["quadrature"]

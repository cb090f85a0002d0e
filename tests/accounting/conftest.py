"""Quadrature, against which bounds are held."""

from quadrature import quadrature

__all__ = ["quadrature"]

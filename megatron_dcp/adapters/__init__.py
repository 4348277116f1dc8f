"""Trainers: each adapter imports its own trainer and knows no other adapter."""

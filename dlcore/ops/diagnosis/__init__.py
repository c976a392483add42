"""Diagnosis for operators: answers of all servers, archives for experts, and faults."""

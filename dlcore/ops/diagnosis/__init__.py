"""Diagnosis for operators: answers of all servers, archives for those who help, and faults."""

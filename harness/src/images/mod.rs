//! What virtual machines and pods are made of.

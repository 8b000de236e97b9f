package evernear;

import io.grpc.ForwardingServerCall.SimpleForwardingServerCall;
import io.grpc.ForwardingServerCallListener.SimpleForwardingServerCallListener;
import io.grpc.Metadata;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.Status;
import com.google.protobuf.MessageLite;
import io.netty.util.concurrent.GlobalEventExecutor;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

/** Bounds what gRPC's calls hold, and tells of the predictions that are answered. */
final class GrpcTraffic implements ServerInterceptor {
    private final Traffic traffic;

    GrpcTraffic(Traffic traffic) {
        this.traffic = traffic;
    }

    @Override
    public <A, B> ServerCall.Listener<A> interceptCall(
            ServerCall<A, B> call, Metadata headers, ServerCallHandler<A, B> next) {
        Call<A, B> ours = new Call<>(call);
        return ours.listen(next.startCall(ours, headers));
    }

    private final class Call<A, B> extends SimpleForwardingServerCall<A, B> {
        private final AtomicInteger held = new AtomicInteger();
        private volatile boolean refused;

        Call(ServerCall<A, B> call) {
            super(call);
        }

        ServerCall.Listener<A> listen(ServerCall.Listener<A> listener) {
            return new SimpleForwardingServerCallListener<A>(listener) {
                @Override
                public void onMessage(A message) {
                    int bytes = ((MessageLite) message).getSerializedSize();
                    if (Limits.IN_FLIGHT_BYTES.tryAcquire(bytes)) {
                        held.addAndGet(bytes);
                        super.onMessage(message);
                    } else {
                        refused = true;
                        close(Status.RESOURCE_EXHAUSTED.withDescription(Limits.EXCEEDED), new Metadata());
                    }
                }

                @Override
                public void onHalfClose() {
                    if (!refused) {
                        super.onHalfClose();
                    }
                }

                /** The call is over for the client; what it asked stays in TorchServe's queue. */
                @Override
                public void onCancel() {
                    GlobalEventExecutor.INSTANCE.schedule(Call.this::release, Limits.ANSWER_S, TimeUnit.SECONDS);
                    super.onCancel();
                }
            };
        }

        /** TorchServe looks here before it answers, and does not answer a call that was cancelled. */
        @Override
        public boolean isCancelled() {
            boolean cancelled = super.isCancelled();
            if (cancelled) {
                release();
            }
            return cancelled;
        }

        @Override
        public void close(Status status, Metadata trailers) {
            release();
            if (status.isOk() && "Predictions".equals(getMethodDescriptor().getBareMethodName())) {
                traffic.answered();
            }
            super.close(status, trailers);
        }

        private void release() {
            Limits.IN_FLIGHT_BYTES.release(held.getAndSet(0));
        }
    }
}

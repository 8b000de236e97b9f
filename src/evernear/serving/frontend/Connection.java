package evernear;

import io.netty.channel.ChannelDuplexHandler;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelPromise;
import io.netty.channel.socket.ChannelInputShutdownEvent;
import io.netty.channel.socket.DuplexChannel;
import io.netty.handler.codec.DecoderException;
import io.netty.handler.codec.http.HttpMethod;
import io.netty.handler.codec.http.HttpObjectAggregator;
import io.netty.handler.codec.http.HttpRequest;
import io.netty.handler.codec.http.HttpResponse;
import io.netty.handler.codec.http.HttpResponseEncoder;
import io.netty.handler.codec.http.HttpResponseStatus;
import io.netty.handler.codec.http.HttpUtil;
import io.netty.handler.codec.http.LastHttpContent;
import io.netty.util.ReferenceCountUtil;
import java.io.IOException;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;

/**
 * One connection: each request is answered before the next is read, whatever it waits for has a time, and when it ends
 * no answer is lost.
 */
final class Connection extends ChannelDuplexHandler {
    private static final int LINGER_S = 30; // for a client to read our last answer and end its side

    private enum State {
        IDLE, // until the head of the next request
        RECEIVING, // its body
        ANSWERING,
        CLOSING // reads and drops what still comes: unread bytes would make a reset, which overtakes the answer
    }

    private final Traffic traffic;
    private final Requests requests = new Requests();
    private volatile State state = State.IDLE; // changed on the connection's own thread alone
    private HttpRequest request;
    private boolean responded;
    private boolean last; // the answer says that the connection ends with it
    private long deadline; // of the state
    private ScheduledFuture<?> timer; // due then or before

    Connection(Traffic traffic) {
        this.traffic = traffic;
    }

    Requests decoder() {
        return requests;
    }

    HttpResponseEncoder encoder() {
        return new HttpResponseEncoder() {
            @Override
            protected boolean isContentAlwaysEmpty(HttpResponse answer) {
                return request != null && request.method().equals(HttpMethod.HEAD)
                        || super.isContentAlwaysEmpty(answer);
            }
        };
    }

    /** Whether a request has no answer yet. */
    boolean isBusy() {
        return state == State.RECEIVING || state == State.ANSWERING;
    }

    @Override
    public void channelActive(ChannelHandlerContext context) {
        traffic.add(this);
        enter(State.IDLE, Limits.IDLE_S, context);
        context.fireChannelActive();
    }

    @Override
    public void channelInactive(ChannelHandlerContext context) {
        timer.cancel(false);
        traffic.remove(this);
        context.fireChannelInactive();
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object message) {
        if (state == State.CLOSING) {
            ReferenceCountUtil.release(message);
            return;
        }
        if (message instanceof HttpRequest) {
            request = (HttpRequest) message;
            responded = false;
            enter(State.RECEIVING, Limits.UPLOAD_S, context);
        }
        if (message instanceof LastHttpContent) {
            requests.hold();
            enter(State.ANSWERING, Limits.ANSWER_S, context);
        }
        context.fireChannelRead(message);
    }

    @Override
    public void write(ChannelHandlerContext context, Object message, ChannelPromise promise) {
        if (message instanceof HttpResponse && !isContinue(message)) {
            begin((HttpResponse) message);
        }
        if (isEndOfAnswer(message)) {
            promise = promise.unvoid();
            promise.addListener(written -> answered(context, written.isSuccess()));
        }
        context.write(message, promise);
    }

    /** Whether all of the answer to a request has been written with this, and not only 100 (Continue). */
    static boolean isEndOfAnswer(Object message) {
        return message instanceof LastHttpContent && !isContinue(message);
    }

    private static boolean isContinue(Object message) {
        return message instanceof HttpResponse
                && ((HttpResponse) message).status().equals(HttpResponseStatus.CONTINUE);
    }

    private void begin(HttpResponse answer) {
        responded = true;
        if (traffic.isDraining() || request == null || !HttpUtil.isKeepAlive(request)) {
            HttpUtil.setKeepAlive(answer, false);
        }
        last = !HttpUtil.isKeepAlive(answer);
        boolean predicted = request != null && request.uri().startsWith("/predictions/");
        if (predicted && answer.status().equals(HttpResponseStatus.OK)) {
            traffic.answered();
        }
    }

    private void answered(ChannelHandlerContext context, boolean written) throws Exception {
        if (!written) {
            context.close();
        } else if (last || state != State.ANSWERING) {
            close(context, context.newPromise());
        } else {
            enter(State.IDLE, Limits.IDLE_S, context);
            requests.next();
        }
    }

    /** Ends our side, and the connection when the client has ended its own. */
    @Override
    public void close(ChannelHandlerContext context, ChannelPromise promise) throws Exception {
        context.channel().closeFuture().addListener(closed -> promise.trySuccess());
        if (state == State.CLOSING || !context.channel().isActive()) {
            return;
        }
        enter(State.CLOSING, LINGER_S, context);
        if (context.pipeline().get(HttpObjectAggregator.class) != null) {
            context.pipeline().remove(HttpObjectAggregator.class); // with what it has of a body
        }
        ((DuplexChannel) context.channel()).shutdownOutput();
        requests.discard();
    }

    @Override
    public void userEventTriggered(ChannelHandlerContext context, Object event) {
        if (event == ChannelInputShutdownEvent.INSTANCE) {
            if (state == State.RECEIVING && !responded) {
                refuse(context, HttpResponseStatus.BAD_REQUEST, "BadRequest", "The request ends before its body does.");
            } else if (state != State.ANSWERING) {
                context.close();
            }
        }
        context.fireUserEventTriggered(event);
    }

    @Override
    public void exceptionCaught(ChannelHandlerContext context, Throwable fault) {
        if (fault instanceof IOException) {
            context.close(); // the client is gone
        } else if (fault instanceof DecoderException && isBusy() && !responded) {
            refuse(context, HttpResponseStatus.BAD_REQUEST, "BadRequest", "The request's body cannot be read.");
        } else {
            context.fireExceptionCaught(fault);
        }
    }

    /** A deadline moves with every state, a timer only where it would be late: to set one takes time. */
    private void enter(State next, long limitSeconds, ChannelHandlerContext context) {
        state = next;
        deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(limitSeconds);
        if (timer == null || timer.getDelay(TimeUnit.NANOSECONDS) > deadline - System.nanoTime()) {
            setTimer(context);
        }
    }

    private void setTimer(ChannelHandlerContext context) {
        if (timer != null) {
            timer.cancel(false);
        }
        long left = deadline - System.nanoTime();
        timer = context.executor().schedule(() -> expire(context), left, TimeUnit.NANOSECONDS);
    }

    private void expire(ChannelHandlerContext context) {
        if (deadline - System.nanoTime() > 0) {
            setTimer(context);
            return;
        }
        if (state == State.RECEIVING && !responded) {
            refuse(
                    context,
                    HttpResponseStatus.REQUEST_TIMEOUT,
                    "TooSlow",
                    "The request's body did not arrive within " + Limits.UPLOAD_S + " s.");
        } else {
            context.close();
        }
    }

    private static void refuse(ChannelHandlerContext context, HttpResponseStatus status, String type, String message) {
        context.channel().writeAndFlush(new Refused(status, type, message).answer());
    }
}
